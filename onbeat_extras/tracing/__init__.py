"""Traces of batches for collectors, by a library each (onbeat/telemetry/correlation.py asks for them)."""
