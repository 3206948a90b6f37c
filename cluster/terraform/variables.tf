variable "project" {
  description = "Google Cloud project, which exists and has a billing account."
  type        = string
}

variable "region" {
  description = "Region of the bucket, the images and the database."
  type        = string
}

variable "zone" {
  description = "Zone of that region which has the TPUs."
  type        = string
}

variable "name" {
  description = "Name of the cluster, the network, the database and the image repository."
  type        = string
  default     = "wan"
}

# wan-tpu manifests --node_pools FILE writes this variable and the next one for a layout.
variable "tpu_pools" {
  description = "By kind of slice: its machines, its topology, its number of hosts, and how many such slices there may be."
  type = map(object({
    machine_type = string
    topology     = string
    hosts        = number
    slices       = number
  }))
  default = {}
}

variable "capacity" {
  description = "How TPU machines are provisioned, as in wan-tpu manifests --capacity."
  type        = string
  default     = "on-demand"
  validation {
    condition     = contains(["on-demand", "spot", "flex-start", "queued"], var.capacity)
    error_message = "The capacity is on-demand, spot, flex-start or queued."
  }
}

variable "reservation" {
  description = "Name of a reservation that the TPU machines of an on-demand capacity come from."
  type        = string
  default     = null
}

variable "cpu_nodes" {
  description = "How many CPU machines there are at least and at most. An upgrade of a service needs a second head."
  type        = object({ least = number, most = number })
  default     = { least = 2, most = 8 }
}

variable "pods" {
  description = "The pods' Kubernetes namespace and service account: --namespace and --name of wan-tpu manifests."
  type        = object({ namespace = string, account = string })
  default     = { namespace = "default", account = "wan-tpu" }
}

variable "hostname" {
  description = "Name by which clients reach the service: creates an address and a certificate. Null for none."
  type        = string
  default     = null
}

variable "database_availability" {
  description = "ZONAL, or REGIONAL for a standby in another zone at twice the price."
  type        = string
  default     = "ZONAL"
}

variable "deletion_protection" {
  description = "Whether terraform destroy must leave the cluster and the database in place."
  type        = bool
  default     = true
}
