"""What clusters are made of where their machines are rented: Kubernetes objects, TPU VMs, the proxy in front."""
