"""The chunk transfer layer: carries what a stage produces to the next stage while it is still being produced."""
