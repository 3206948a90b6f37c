"""Create the cluster of a layout, on Kubernetes or on TPU VMs."""
