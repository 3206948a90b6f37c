"""Images in, videos out."""
