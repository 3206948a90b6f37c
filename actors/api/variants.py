"""The files of a finished video."""

VARIANTS = {  # by the API's name: media type and ending
    "video": ("video/mp4", "mp4"),
    "thumbnail": ("image/webp", "webp"),
    "spritesheet": ("image/jpeg", "jpg"),
}
