"""Files of people, read and written strictly."""
