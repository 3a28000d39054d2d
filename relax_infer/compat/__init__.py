"""For those who come from elsewhere: the reference's names and flags."""
