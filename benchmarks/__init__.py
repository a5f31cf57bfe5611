"""Measurements behind the numbers memfit states: one folder for each question, with its table in its README."""
