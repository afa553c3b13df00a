"""Recipes for tiny random-weight models."""
