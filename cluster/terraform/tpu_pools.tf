locals {
  # GKE scales a node pool of several hosts as a whole, so each slice of such a kind is a pool of its own.
  tpu_pools = merge([
    for kind, pool in var.tpu_pools : {
      for number in range(pool.hosts == 1 ? 1 : pool.slices) :
      (pool.hosts == 1 ? kind : "${kind}-${number}") => {
        kind         = kind
        machine_type = pool.machine_type
        topology     = pool.topology
        hosts        = pool.hosts
        nodes        = pool.hosts == 1 ? pool.slices : pool.hosts
      }
    }
  ]...)
  is_flex_start = contains(["flex-start", "queued"], var.capacity)
  # Slices of several TPU7x hosts are placed by a policy of their kind; those of earlier generations, by GKE.
  placed_kinds = { for kind, pool in var.tpu_pools : kind => pool.topology if pool.hosts > 1 && startswith(pool.machine_type, "tpu7x-") }
}

resource "google_compute_resource_policy" "slices" {
  for_each = local.placed_kinds
  name     = "${var.name}-${each.key}"
  region   = var.region
  workload_policy {
    type                 = "HIGH_THROUGHPUT"
    accelerator_topology = each.value
  }
  depends_on = [google_project_service.used]
}

resource "google_container_node_pool" "tpu" {
  for_each           = local.tpu_pools
  name               = each.key
  cluster            = google_container_cluster.wan.id
  initial_node_count = 0

  autoscaling {
    min_node_count  = 0
    max_node_count  = each.value.nodes
    location_policy = "ANY"
  }
  management {
    auto_repair  = !local.is_flex_start # GKE refuses it for flex-start.
    auto_upgrade = true
  }
  dynamic "placement_policy" {
    for_each = each.value.hosts > 1 ? [each.value] : []
    content {
      type         = "COMPACT"
      policy_name  = contains(keys(local.placed_kinds), each.value.kind) ? google_compute_resource_policy.slices[each.value.kind].name : null
      tpu_topology = contains(keys(local.placed_kinds), each.value.kind) ? null : each.value.topology
    }
  }
  dynamic "queued_provisioning" {
    for_each = var.capacity == "queued" ? [true] : []
    content {
      enabled = true # Machines come for a ProvisioningRequest alone.
    }
  }

  node_config {
    machine_type    = each.value.machine_type
    disk_size_gb    = 300 # Weights from the hub take 130 GB.
    spot            = var.capacity == "spot"
    flex_start      = local.is_flex_start
    service_account = google_service_account.nodes.email
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    workload_metadata_config {
      mode = "GKE_METADATA"
    }
    reservation_affinity {
      consume_reservation_type = var.reservation == null ? "NO_RESERVATION" : "SPECIFIC_RESERVATION"
      key                      = var.reservation == null ? null : "compute.googleapis.com/reservation-name"
      values                   = var.reservation == null ? null : [var.reservation]
    }
    # Without transparent hugepages, JAX warns that libtpu is slower.
    linux_node_config {
      transparent_hugepage_enabled = "TRANSPARENT_HUGEPAGE_ENABLED_ALWAYS"
    }
  }

  lifecycle {
    precondition {
      condition     = var.reservation == null || var.capacity == "on-demand"
      error_message = "A reservation is for on-demand capacity; leave out one of the two."
    }
  }
}
