"""Training of masked-diffusion language models: data, objective and optimiser apart, for any backbone."""
