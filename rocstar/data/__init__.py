"""Problems, SFT rows and the synthetic arithmetic tasks."""
