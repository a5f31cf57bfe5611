"""Pipelining: a step on K devices, M micro-batches at a time, with a plan for each stage."""
