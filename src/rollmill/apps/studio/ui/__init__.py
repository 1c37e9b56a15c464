"""The local web application of `rollmill ui`: looks at runs while they go on, and afterwards."""
