"""What a person sees of a run: the table, its reading in plain words, the figures. Takes plain data, knows no other room."""
