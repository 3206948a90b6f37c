"""What the service sends to other servers on behalf of clients: images fetched, webhooks."""
