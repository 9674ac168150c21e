"""Traces of batches for collectors, by a library each (onbeat/base/telemetry/correlation.py asks for them)."""
