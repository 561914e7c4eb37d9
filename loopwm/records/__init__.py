"""Records: file formats, configuration and errors, each in one place. Nothing here needs torch."""
