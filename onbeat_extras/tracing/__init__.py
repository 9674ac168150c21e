"""Traces of batches for collectors, by a library each (telemetry/tracing.py asks for them)."""
