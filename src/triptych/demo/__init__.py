"""The demo: image questions through encode, prefill and decode engines, with proofs that each did its part."""
