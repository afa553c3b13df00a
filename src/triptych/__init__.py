"""Triptych: disaggregated multimodal serving on stock vLLM."""

__version__ = "0.1.0"
