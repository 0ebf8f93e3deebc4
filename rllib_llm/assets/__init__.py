"""Models shipped inside the package; each directory is in Hugging Face format and says how it was made."""
