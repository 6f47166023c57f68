"""Which peers are live, how they are reached, and what is known of them."""
