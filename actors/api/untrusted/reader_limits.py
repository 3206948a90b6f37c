"""What a reading process may use."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReaderLimits:
    """The descriptors that a reading process gets, and the limits that it runs under."""

    file: int  # Descriptor of the file that is read.
    # Descriptors of others in memory, each of the largest size that a video may have: for `video`, then for references.
    scratch: tuple[int, ...]
    memory: int  # Bytes of memory. The ffmpeg that the process starts for a video gets as many.
    cpu_s: int  # Processor time; ffmpeg gets `video_cpu_s`.
    video_cpu_s: int
    video_pixels: int  # The most pixels of a video's frame.
    video_s: float  # How long a video that is continued may last.
