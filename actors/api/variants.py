"""The files of a video: its results, and the inputs of its request."""

VARIANTS = {  # Media type and file name extension by the API's name.
    "video": ("video/mp4", "mp4"),
    "thumbnail": ("image/webp", "webp"),
    "spritesheet": ("image/jpeg", "jpg"),
    "final_frame": ("image/png", "png"),
    "preview": ("image/jpeg", "jpg"),
    "input_reference": ("image/png", "png"),
    "last_frame": ("image/png", "png"),
    "input_video": ("video/mp4", "mp4"),
}
