"""How does text become an indexed dataset: inputs, tokenizer, preprocessing?"""
