"""The gateway: plans, legs, pools, hand-over, relay."""
