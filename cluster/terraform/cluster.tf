resource "google_container_cluster" "wan" {
  name                = var.name
  location            = var.zone
  network             = google_compute_network.wan.id
  subnetwork          = google_compute_subnetwork.wan.id
  deletion_protection = var.deletion_protection
  datapath_provider   = "ADVANCED_DATAPATH" # Enforces network policies.

  # The node pools below can be changed without the cluster; the default one can't.
  remove_default_node_pool = true
  initial_node_count       = 1

  release_channel {
    channel = "RAPID" # New generations of TPUs come here first.
  }
  ip_allocation_policy {
    cluster_secondary_range_name  = "pods"
    services_secondary_range_name = "services"
  }
  private_cluster_config {
    enable_private_nodes = true
  }
  # kubectl reaches the control plane by its name, with a Google identity, from anywhere.
  control_plane_endpoints_config {
    dns_endpoint_config {
      allow_external_traffic = true
    }
  }
  workload_identity_config {
    workload_pool = "${var.project}.svc.id.goog"
  }
  gateway_api_config {
    channel = "CHANNEL_STANDARD"
  }
  addons_config {
    # KubeRay, and the webhook that tells TPU pods their position in a slice.
    ray_operator_config {
      enabled = true
    }
  }
  monitoring_config {
    enable_components = ["SYSTEM_COMPONENTS"]
    managed_prometheus {
      enabled = true
    }
  }
}

# Heads, leaders, ingresses and workers, and what GKE itself runs.
resource "google_container_node_pool" "cpu" {
  name               = "cpu"
  cluster            = google_container_cluster.wan.id
  initial_node_count = var.cpu_nodes.least

  autoscaling {
    min_node_count = var.cpu_nodes.least
    max_node_count = var.cpu_nodes.most
  }
  node_config {
    machine_type    = "e2-standard-8"
    service_account = google_service_account.nodes.email
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    workload_metadata_config {
      mode = "GKE_METADATA"
    }
  }
}
