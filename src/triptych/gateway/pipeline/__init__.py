"""Answers in sound: a request goes to every stage of a pipeline at once, and the last stage's chunks come here."""
