"""What creates clusters of a layout: on Kubernetes, on TPU VMs."""
