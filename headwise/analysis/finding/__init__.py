"""Search for the heads that do a job which the user describes by examples."""
