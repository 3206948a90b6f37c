resource "google_compute_network" "wan" {
  name                    = var.name
  auto_create_subnetworks = false
  depends_on              = [google_project_service.used]
}

resource "google_compute_subnetwork" "wan" {
  name                     = var.name
  network                  = google_compute_network.wan.id
  region                   = var.region
  ip_cidr_range            = "10.0.0.0/20"
  private_ip_google_access = true # Buckets are read without leaving Google's network.

  secondary_ip_range {
    range_name    = "pods"
    ip_cidr_range = "10.4.0.0/14"
  }
  secondary_ip_range {
    range_name    = "services"
    ip_cidr_range = "10.8.0.0/20"
  }
}

# Machines have no addresses of their own: images and weights from elsewhere come through this.
resource "google_compute_router" "wan" {
  name    = var.name
  network = google_compute_network.wan.id
  region  = var.region
}

resource "google_compute_router_nat" "wan" {
  name                               = var.name
  router                             = google_compute_router.wan.name
  region                             = var.region
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "ALL_SUBNETWORKS_ALL_IP_RANGES"
}

# The database's private address is in this range.
resource "google_compute_global_address" "google_services" {
  name          = "${var.name}-google-services"
  network       = google_compute_network.wan.id
  purpose       = "VPC_PEERING"
  address_type  = "INTERNAL"
  prefix_length = 16
}

resource "google_service_networking_connection" "google_services" {
  network                 = google_compute_network.wan.id
  service                 = "servicenetworking.googleapis.com"
  reserved_peering_ranges = [google_compute_global_address.google_services.name]
  # For four days after its deletion Cloud SQL holds the connection, which would hold the network.
  deletion_policy = "REMOVE_PEERING"
}
