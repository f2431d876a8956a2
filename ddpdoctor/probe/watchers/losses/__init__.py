"""How is the loss made, and by what is it divided?"""
