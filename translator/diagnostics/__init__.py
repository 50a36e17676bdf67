"""Proofs and measurements: parity, latency, memory."""
