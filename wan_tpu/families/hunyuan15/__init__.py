"""HunyuanVideo-1.5. Its spec stands; it registers itself (`FAMILY`) once its model does, so nothing finds it yet."""
