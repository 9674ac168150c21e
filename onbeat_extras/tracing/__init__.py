"""Traces of batches for collectors, by a library each (onbeat/telemetry/tracing.py asks for them)."""
