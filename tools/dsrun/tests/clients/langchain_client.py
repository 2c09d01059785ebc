"""LangChain's ChatOpenAI and OpenAIEmbeddings: strict tools, histories, structured outputs, streams, Responses.

Usage: langchain_client.py URL KEY MODEL
"""

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from shared import QUESTION, City, run, weather

WEATHER = tool(weather)


def chat(url, key, model, **settings):
    settings = {"temperature": 0, "max_tokens": 200} | settings
    return ChatOpenAI(base_url=f"{url}/v1", api_key=key, model=model, max_retries=0, timeout=120, **settings)


def answers(url, key, model):
    llm = chat(url, key, model)
    answer = llm.invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
    assert answer.content and answer.usage_metadata["output_tokens"] <= 200, answer
    chunks = list(llm.stream([SystemMessage("Be brief."), HumanMessage(QUESTION)], stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == answer.content, chunks


def loop(llm, **binding):
    """Calls a tool, sends the result back with the message of the model as LangChain keeps it, and goes on."""
    for stream in [False, True]:
        ask = (lambda bound, messages: sum_up(bound.stream(messages))) if stream else (lambda bound, messages: bound.invoke(messages))
        messages = [HumanMessage(QUESTION)]
        for _ in range(2):
            answer = ask(llm.bind_tools([WEATHER], tool_choice="any", **binding), messages)
            assert answer.tool_calls and not answer.invalid_tool_calls, answer
            messages += [answer, *(WEATHER.invoke(call) for call in answer.tool_calls)]
        messages.append(ask(llm.bind_tools([WEATHER], **binding), messages))
        messages.append(HumanMessage("And in Rome?"))
        ask(llm.bind_tools([WEATHER], tool_choice="weather", **binding), messages)


def sum_up(chunks):
    whole = next(chunks)
    for chunk in chunks:
        whole += chunk
    return whole


def tools(url, key, model):
    loop(chat(url, key, model))
    loop(chat(url, key, model), strict=True, parallel_tool_calls=False)


def responses(url, key, model):
    llm = chat(url, key, model, use_responses_api=True)
    assert llm.invoke(QUESTION).text
    loop(llm, strict=True)
    assert isinstance(llm.with_structured_output(City).invoke(QUESTION), City)


def forms(url, key, model):
    llm = chat(url, key, model, max_tokens=200)
    for method in ["json_schema", "function_calling"]:
        for strict in [True, None]:
            answer = llm.with_structured_output(City, method=method, strict=strict).invoke(QUESTION)
            assert isinstance(answer, City), (method, answer)
    answer = llm.with_structured_output(City, include_raw=True).invoke(QUESTION)
    assert isinstance(answer["parsed"], City) and answer["raw"].content, answer


def vectors(url, key, model):
    # LangChain sends tokens of OpenAI's tokenizer unless it is told that the server has another.
    embeddings = OpenAIEmbeddings(base_url=f"{url}/v1", api_key=key, model=model, check_embedding_ctx_length=False)
    first, second = embeddings.embed_documents(["Paris", "Rome"])
    assert first != second and embeddings.embed_query("Paris") == first


if __name__ == "__main__":
    run(answers, tools, responses, forms, vectors)
