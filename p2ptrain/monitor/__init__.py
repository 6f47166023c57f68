"""Monitoring: live view, metrics for Prometheus, dashboard and doctor."""
