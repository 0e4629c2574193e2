// Descriptors: aclTensor, aclScalar, aclIntArray, aclTensorList. libnnopbase.
#include <stdlib.h>
#include <string.h>

#include "op.h"

static int item(int dtype) {
	static const int bytes[] = {[0] = 4, [1] = 2, [2] = 1, [3] = 4, [4] = 1, [6] = 2, [7] = 2, [8] = 4, [9] = 8, [10] = 8, [11] = 8, [12] = 1, [16] = 8, [17] = 16, [27] = 2};
	return dtype >= 0 && dtype < LENGTH(bytes) ? bytes[dtype] : 0;
}

EXPORT int fake_item(int dtype) {
	return item(dtype);
}

// Entries that return a pointer.
#define ENTER_POINTER()                                                                                                                      \
	TIMED();                                                                                                                                 \
	if (fake_enter(__func__))                                                                                                                \
	return 0
#define REFUSE(...) return fake_error(NN_ARGUMENT, __VA_ARGS__), (void *)0

EXPORT void *aclCreateTensor(const int64_t *dims, uint64_t rank, int dtype, const int64_t *strides, int64_t offset, int format, const int64_t *storage,
                             uint64_t storage_rank, void *data) {
	ENTER_POINTER();
	if (rank > MAX_RANK || storage_rank > MAX_RANK || (rank && !dims) || (storage_rank && !storage))
		REFUSE("aclCreateTensor: rank %lu, storage of rank %lu, expected at most %d and their sizes", rank, storage_rank, MAX_RANK);
	if (!item(dtype))
		REFUSE("aclCreateTensor: data type %d is not known", dtype);
	if (format != 2 && format != 0 && format != 1 && format != 30 && format != 47)
		REFUSE("aclCreateTensor: format %d; this fake has ND 2, NCHW 0, NHWC 1, NCDHW 30, NCL 47", format);
	if ((uintptr_t)data % 32)
		REFUSE("aclCreateTensor: the storage starts at %p, which is not a multiple of 32; pass a view's offset as such", data);
	Tensor t = {.rank = (int)rank, .dtype = dtype, .format = format, .storage_rank = (int)storage_rank, .offset = offset, .data = data};
	int64_t room = 1, last = offset, count = 1, step = 1;
	for (uint64_t i = 0; i < storage_rank; i++) {
		if (storage[i] < 0)
			REFUSE("aclCreateTensor: size %lu of the storage is %ld", i, storage[i]);
		room *= t.storage[i] = storage[i];
	}
	for (int i = (int)rank - 1; i >= 0; i--) {
		if (dims[i] < 0 || (strides && strides[i] < 0))
			REFUSE("aclCreateTensor: dimension %d has size %ld and stride %ld", i, dims[i], strides ? strides[i] : step);
		t.dims[i] = dims[i], t.strides[i] = strides ? strides[i] : step;
		step *= dims[i], count *= dims[i];
		last += (dims[i] - 1) * t.strides[i];
	}
	if (offset < 0 || (count && last >= room))
		REFUSE("aclCreateTensor: elements %ld to %ld do not lie in a storage of %ld", offset, last, room);
	if (count && !data)
		REFUSE("aclCreateTensor: %ld elements at address null", count);
	Tensor *made = fake_new(TENSOR, sizeof *made);
	t.handle = made->handle;
	return *made = t, made;
}

EXPORT int aclDestroyTensor(void *tensor) {
	ENTER();
	return tensor ? fake_delete(tensor, TENSOR) : OK;
}

EXPORT void *aclCreateScalar(const void *p, int dtype) {
	ENTER_POINTER();
	if (!p)
		REFUSE("aclCreateScalar: null");
	double v;
	switch (dtype) {
	case 0: v = *(const float *)p; break;
	case 1: v = (double)*(const _Float16 *)p; break;
	case 2: v = *(const int8_t *)p; break;
	case 3: v = *(const int32_t *)p; break;
	case 4: v = *(const uint8_t *)p; break;
	case 6: v = *(const int16_t *)p; break;
	case 9: v = (double)*(const int64_t *)p; break;
	case 11: v = *(const double *)p; break;
	case 12: v = *(const _Bool *)p; break;
	case 27: {
		uint32_t bits = (uint32_t)*(const uint16_t *)p << 16;
		float f;
		memcpy(&f, &bits, 4);
		v = f;
		break;
	}
	default: REFUSE("aclCreateScalar: data type %d is not known", dtype);
	}
	Scalar *s = fake_new(SCALAR, sizeof *s);
	return s->dtype = dtype, s->value = v, s;
}

EXPORT int aclDestroyScalar(void *scalar) {
	ENTER();
	return scalar ? fake_delete(scalar, SCALAR) : OK;
}

EXPORT void *aclCreateIntArray(const int64_t *v, uint64_t n) {
	ENTER_POINTER();
	if (n && !v)
		REFUSE("aclCreateIntArray: %lu numbers at address null", n);
	IntArray *a = fake_new(INT_ARRAY, sizeof *a + n * sizeof *v);
	a->n = (int64_t)n;
	if (n)
		memcpy(a->v, v, n * sizeof *v);
	return a;
}

EXPORT int aclDestroyIntArray(void *array) {
	ENTER();
	return array ? fake_delete(array, INT_ARRAY) : OK;
}

EXPORT void *aclCreateTensorList(Tensor *const *v, uint64_t n) {
	ENTER_POINTER();
	for (uint64_t i = 0; i < n; i++)
		if (!fake_is(v[i], TENSOR))
			return 0;
	TensorList *l = fake_new(TENSOR_LIST, sizeof *l + n * sizeof *v);
	l->n = (int64_t)n, l->v = (Tensor **)(l + 1);
	if (n)
		memcpy(l->v, v, n * sizeof *v);
	return l;
}

// The tensors go with their list.
EXPORT int aclDestroyTensorList(void *list) {
	ENTER();
	if (!list)
		return OK;
	if (fake_is(list, TENSOR_LIST))
		for (int64_t i = 0; i < ((TensorList *)list)->n; i++)
			fake_delete(((TensorList *)list)->v[i], TENSOR);
	return fake_delete(list, TENSOR_LIST);
}

EXPORT int aclnnInit(const char *config) {
	ENTER();
	(void)config;
	return OK;
}

EXPORT int aclnnFinalize(void) {
	ENTER();
	return OK;
}

// Scratch memory of the real library, which clients bracket their calls with.
EXPORT int InitHugeMemThreadLocal(void *config, bool shared) {
	(void)config, (void)shared;
	return OK;
}

EXPORT void UnInitHugeMemThreadLocal(void *config, bool shared) {
	(void)config, (void)shared;
}

EXPORT void ReleaseHugeMem(void *config, bool shared) {
	(void)config, (void)shared;
}
