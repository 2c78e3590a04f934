"""Score text with masked-diffusion language models."""
