"""Requests to other servers on behalf of clients: fetching images, calling webhooks."""
