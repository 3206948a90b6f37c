terraform {
  required_version = ">= 1.5" # or OpenTofu
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = "~> 8.7"
    }
  }
}

provider "google" {
  project = var.project
  region  = var.region
}
