"""How the bytes of a round move. Begin with `member`.

`leader` leads the averaging of one attempt. `member` takes part in it: it takes a `snapshot` of the weights, encodes it
and sends its chunks to the reducers. If we are a reducer, `collection` has the chunks of our part, `reducer` averages
them, and `pushed_means` carries the mean to all members. `fetch` gets the parts of a record that were not pushed, and
`part_store` keeps and serves them. `audit` averages a part again after the round.
"""
