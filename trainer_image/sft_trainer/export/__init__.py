"""A verified checkpoint as a Hugging Face folder: ``plan`` says which files, ``exporting`` writes them."""
