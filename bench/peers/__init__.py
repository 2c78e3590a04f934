"""What users would otherwise run, each written from its paper and public behaviour, at its best reasonable settings."""
