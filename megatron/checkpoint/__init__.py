"""What is saved, what a load restores, and the files in between."""
