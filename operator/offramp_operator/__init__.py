"""The operator: sees a cluster, or one machine, and brings its services to what their specs ask for.

port.py      the operator's HTTP port: health for the kubelet, metrics for Prometheus
main.py      entry point of the operator process
metrics.py   what the operator tells Prometheus
settings.py  the operator's environment, read once
"""
