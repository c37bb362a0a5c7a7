"""A backend that is found because its folder is: half of the memory, twice the caveats, the reference's arithmetic."""
