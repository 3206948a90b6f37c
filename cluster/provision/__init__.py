"""Clusters of rented machines: Kubernetes objects, scripts of TPU VMs, the proxy in front of a service."""
