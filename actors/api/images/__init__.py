"""Images of strangers, decoded in processes of their own."""
