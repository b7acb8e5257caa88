"""People meet it: tables, pictures, the page, notebooks, the demo."""
