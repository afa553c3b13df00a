"""Families of stage models, a folder for each (`triptych.models.families` finds them)."""
