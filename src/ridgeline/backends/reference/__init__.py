"""The reference backend interprets the program op by op in plain torch."""
