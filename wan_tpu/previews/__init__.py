"""Pictures of a video while it is denoised: what a step's estimate of the clean latents looks like.

A linear map from the latents' channels to colours costs next to nothing and exists for every model (`colours`); a tiny
decoder shows details where its file is given (`taehv`). Neither runs in the denoising loop (`watching`).
"""
