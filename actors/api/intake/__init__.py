"""The old place of `actors.api.core.receiving`."""
